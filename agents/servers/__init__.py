"""SGLang servers as a policy and as a scorer, and new weights for them."""
