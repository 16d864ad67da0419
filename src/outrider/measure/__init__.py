"""What every measurement is made of: turns, ratios, the machine, records and pages."""
