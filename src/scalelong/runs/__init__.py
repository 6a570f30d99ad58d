"""One run: the parts it is made of, its folder, its samples."""
