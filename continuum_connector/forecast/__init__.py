"""WHEN its program comes back: how long tools take and people pause. Learned while serving."""
