"""Commands that compute with recorded runs or configurations, one module each."""
