"""What every operator is made of: schema, registry, parameters, inference rules, and how a kernel is called."""
