"""What a configuration of DeepSpeed means here: each of its keys answered, and code to paste.

Free of torch, and of `Config`, which is made from what is found here. DeepSpeed's own names and
defaults are those of version 0.19.8 and of its documentation; names that it had earlier are known.
"""

from __future__ import annotations

from onecopy.deepspeed_config.conversion import Conversion, convert

__all__ = ["Conversion", "convert"]
