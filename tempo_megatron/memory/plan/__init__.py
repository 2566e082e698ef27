"""Plans what each layer keeps, so that a step is shortest within a budget."""
