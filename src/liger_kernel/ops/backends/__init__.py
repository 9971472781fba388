"""Where other projects look for vendor implementations; `registry` says there are none."""
