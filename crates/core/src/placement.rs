//! Where a file goes and what is evicted: pure functions that return their reason.
