"""Text as sequences of tokens: where it comes from, what is held out, who trains on what."""

from onecopy.training.data.batches import Batches, Shard, held_out_batches, steps_per_epoch
from onecopy.training.data.corpus import (
    TOKENIZER_FOLDER,
    UNIFORM_BITS,
    Corpus,
    load_corpus,
    unigram_bits,
)
from onecopy.training.data.sources import find_files
from onecopy.training.data.windows import IGNORED

__all__ = [
    "IGNORED",
    "TOKENIZER_FOLDER",
    "UNIFORM_BITS",
    "Batches",
    "Corpus",
    "Shard",
    "find_files",
    "held_out_batches",
    "load_corpus",
    "steps_per_epoch",
    "unigram_bits",
]
