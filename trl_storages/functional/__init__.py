"""Pure formulas on tensors: no storage, no state, any device."""
