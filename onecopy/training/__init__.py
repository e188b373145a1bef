"""The ready-made trainer behind `onecopy train`: a byte-level GPT on real English text.

It is also the longest worked example of the public interface: `trainer.py` uses nothing of
onecopy that a user could not use.
"""
