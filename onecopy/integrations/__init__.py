"""Host frameworks that run the loop: Hugging Face's Trainer, Accelerate, Lightning.

    from onecopy.integrations.huggingface import OneCopyTrainer
    from onecopy.integrations.accelerate import prepare
    import onecopy.integrations.lightning  # Trainer(strategy="onecopy")

Each module imports its host; without it, the error says which extra brings it.
"""
