"""Commands that look at recorded runs, one module each."""
