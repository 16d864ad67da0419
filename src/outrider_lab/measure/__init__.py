"""Parts of every measurement: turns, ratios, the machine, records and pages."""
