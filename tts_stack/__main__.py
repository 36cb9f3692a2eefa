"""`python -m tts_stack` is `tts-stack`."""

from tts_stack.cli import main

main()
