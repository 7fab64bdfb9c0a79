"""Dense convolutions as compiled matrix products over offset tables."""
