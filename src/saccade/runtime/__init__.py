"""What every call passes through: checks, the choice of a backend, calls that were made before."""
