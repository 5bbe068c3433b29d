"""Small environments that show something; `env=examples.terms:HopperTerms-v0` finds them."""
