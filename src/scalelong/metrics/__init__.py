"""How good samples are: features of images, and distances between sets of features."""
