"""`onecopy doctor`: what this machine has, whether ranks reach each other, and what to change."""
