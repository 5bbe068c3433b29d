"""Small environments and a wrapper; `env=examples.terms:HopperTerms-v0` finds them."""
