"""The optimizer: parameter groups, rates, and the steps of torch's optimizers over flat gradients."""
