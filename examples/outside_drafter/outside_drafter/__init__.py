"""A package that adds to Outrider: a module for each plugin, with its description KIND."""
