//! Tiers and their devices: exact byte accounting, caps, health. They never decide.
