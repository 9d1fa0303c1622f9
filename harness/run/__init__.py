"""From an experiment YAML to journals: configuration, plan, composition, engine, journal, budget."""
