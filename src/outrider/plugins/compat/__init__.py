"""Classes of other programs under their own names: `ModelWrapper` and `AutoregressiveDecoder`."""
