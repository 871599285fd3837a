//! Seeds at which a random search failed once. Each search runs its own seeds first, so that a fixed fault stays fixed.

/// Lines of `SEARCH SEED`; a comment (`#`) above each names the fault.
const KEPT: &str = include_str!("seeds.txt");

/// The seeds of one search, in the order of the file.
pub fn kept(search: &str) -> Vec<u64> {
    let lines = KEPT.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#'));
    let pairs = lines.map(|line| {
        let (search, seed) = line.split_once(' ').unwrap_or_else(|| panic!("seeds.txt: {line}"));
        (search, seed.parse().unwrap_or_else(|why| panic!("seeds.txt: {line}: {why}")))
    });
    pairs.filter(|(name, _)| *name == search).map(|(_, seed)| seed).collect()
}
