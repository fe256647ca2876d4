"""Indexes on disk: build (resumable), inspect, verify, plan."""
