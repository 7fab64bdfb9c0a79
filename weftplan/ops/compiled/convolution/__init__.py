"""Dense convolutions as compiled products over tables of offsets."""
