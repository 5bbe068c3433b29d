"""What reads run folders after the fact. Nothing here imports torch."""
