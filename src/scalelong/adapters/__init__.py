"""All knowledge of other people's models, one file each, imported when such a model comes."""
