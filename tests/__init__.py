"""The tests of onecopy, and what they share."""
