"""`turngym bench gpu`: a training step of the paper's shapes on one device, against the plan, with checks of itself."""
