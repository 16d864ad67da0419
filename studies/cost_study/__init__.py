"""The cost study (`run.py ssd`): passes and engines of models that are costs alone."""
