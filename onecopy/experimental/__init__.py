"""Things to try: they may change or go without notice, and nothing else in onecopy uses them."""
