"""The noise process, and the way back: sampling."""
