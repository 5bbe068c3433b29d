"""Small environments that show something; `env=examples.beacons:Beacons-v0` finds them."""
