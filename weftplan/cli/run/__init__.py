"""``weftplan run``: a model's outputs on arrays from files, on an image, or on a folder of images."""
