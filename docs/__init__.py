"""The pages of the documentation. docs/generate/ writes those that are made from the sources."""
