"""The parts of every operator: schema, registry, parameters, inference rules, kernel calls."""
