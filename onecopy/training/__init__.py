"""The ready-made trainer behind `onecopy train`: a small GPT, or one of Hugging Face's models.

It is also the longest worked example of the public interface: `trainer.py` uses nothing of
onecopy that a user could not use.
"""
