"""The teachers of a job before they are built: found, checked, and fitted to the flags."""
