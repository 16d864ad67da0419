"""The cost study (`outrider bench ssd`): passes and engines of models that are costs alone."""
