//! Sea's makespan model, equations 1–11, each a pure function under its number, with the paper's symbols.
//!
//! Source: Hayot-Sasson, Dugré, Glatard: "Sea: A lightweight data-placement library for Big Data scientific computing",
//! section 3.4.
//!
//! The model has bandwidths only: no latency, no metadata, no computing. The simulation has them, and agrees with these
//! equations where they are all zero (`planner/tests.rs`). Any units fit, as long as all bytes and seconds agree.
//!
//! The danger that it avoids: symbols that mean two things. The paper writes `c` for "compute nodes" and `C` for
//! "cache", and in equation 9 `r` for the room on a disk. Here the fields have names, and comments have the symbols.

/// The file system that all nodes share, and the nodes that use it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Lustre {
    /// N, network bandwidth of one node (computing or storing).
    pub network: f64,
    /// c, compute nodes used.
    pub compute_nodes: f64,
    /// s, storage nodes.
    pub storage_nodes: f64,
    /// p, parallel application processes on each compute node.
    pub processes: f64,
    /// d, storage disks.
    pub disks: f64,
    /// d_r, read bandwidth of one storage disk.
    pub disk_read: f64,
    /// d_w, write bandwidth of one storage disk.
    pub disk_write: f64,
}

/// The resources of each compute node.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Node {
    /// C_r, page cache read bandwidth.
    pub cache_read: f64,
    /// C_w, page cache write bandwidth.
    pub cache_write: f64,
    /// t, room on tmpfs.
    pub tmpfs_room: f64,
    /// g, local disks.
    pub disks: f64,
    /// r, room on one local disk.
    pub disk_room: f64,
    /// G_r, read bandwidth of one local disk.
    pub disk_read: f64,
    /// G_w, write bandwidth of one local disk.
    pub disk_write: f64,
}

/// The application's traffic.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Traffic {
    /// D_I, input data.
    pub input: f64,
    /// D_m, intermediate data.
    pub intermediate: f64,
    /// D_f, final output data.
    pub output: f64,
    /// F, size of a single file.
    pub file: f64,
}

/// (1) M_l = D_r / L_r + D_w / L_w: everything goes to Lustre, nothing to the page cache.
pub fn lustre(read: f64, written: f64, lustre_read: f64, lustre_write: f64) -> f64 {
    read / lustre_read + written / lustre_write
}

/// (2) L_r = min(c N, s N, d_r min(d, c p)): Lustre's read bandwidth.
pub fn lustre_read(lustre: &Lustre) -> f64 {
    bottleneck(lustre, lustre.disk_read)
}

/// (3) L_w = min(c N, s N, d_w min(d, c p)): Lustre's write bandwidth.
pub fn lustre_write(lustre: &Lustre) -> f64 {
    bottleneck(lustre, lustre.disk_write)
}

fn bottleneck(lustre: &Lustre, disk: f64) -> f64 {
    let busy_disks = lustre.disks.min(lustre.compute_nodes * lustre.processes);
    (lustre.compute_nodes * lustre.network).min(lustre.storage_nodes * lustre.network).min(disk * busy_disks)
}

/// (4) M_c = D_cr / (c C_r) + D_cw / (c C_w): reading and writing within the page caches of c nodes.
pub fn cache(read: f64, written: f64, compute_nodes: f64, node: &Node) -> f64 {
    read / (compute_nodes * node.cache_read) + written / (compute_nodes * node.cache_write)
}

/// (5) M_lc = D_I / L_r + M_c: Lustre when all but the first read happens in the page cache.
pub fn lustre_cached(traffic: &Traffic, lustre: &Lustre, node: &Node) -> f64 {
    let within_cache = cache(traffic.intermediate, traffic.intermediate + traffic.output, lustre.compute_nodes, node);
    traffic.input / lustre_read(lustre) + within_cache
}

/// (6) M_S = D_I / L_r + M_1 + … + M_n: Sea over any number of levels, never two of them at a time.
pub fn sea_levels(input: f64, lustre_read: f64, levels: &[f64]) -> f64 {
    input / lustre_read + levels.iter().sum::<f64>()
}

/// (7) M_S = M_SL + M_Sg + M_St: Sea over tmpfs, local disks and Lustre, without any page cache.
pub fn sea(traffic: &Traffic, lustre: &Lustre, node: &Node) -> f64 {
    sea_lustre(traffic, lustre, node) + sea_disks(traffic, lustre, node) + sea_tmpfs(traffic, lustre, node)
}

/// Bytes read from and written to one level.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Level {
    /// Bytes read from the level: D_tr or D_gr.
    pub read: f64,
    /// Bytes written to the level: D_tw or D_gw.
    pub written: f64,
}

/// Of (8): D_tr = min(D_m, max(c (t − p F), 0)) and D_tw = min(D_m + D_f, max(c (t − p F), 0)). Sea leaves room for one file of each process.
pub fn tmpfs_traffic(traffic: &Traffic, lustre: &Lustre, node: &Node) -> Level {
    let room = (lustre.compute_nodes * (node.tmpfs_room - lustre.processes * traffic.file)).max(0.0);
    Level { read: traffic.intermediate.min(room), written: (traffic.intermediate + traffic.output).min(room) }
}

/// (8) M_St = D_tr / (c C_r) + D_tw / (c C_w): Sea's time on tmpfs.
pub fn sea_tmpfs(traffic: &Traffic, lustre: &Lustre, node: &Node) -> f64 {
    let level = tmpfs_traffic(traffic, lustre, node);
    cache(level.read, level.written, lustre.compute_nodes, node)
}

/// Of (9): D_gr = min(D_m − D_tr, max(c (g r − p F), 0)) and D_gw = min(D_m + D_f − D_tw, max(c (g r − p F), 0)).
pub fn disks_traffic(traffic: &Traffic, lustre: &Lustre, node: &Node) -> Level {
    let above = tmpfs_traffic(traffic, lustre, node);
    let room = (lustre.compute_nodes * (node.disks * node.disk_room - lustre.processes * traffic.file)).max(0.0);
    Level {
        read: (traffic.intermediate - above.read).min(room),
        written: (traffic.intermediate + traffic.output - above.written).min(room),
    }
}

/// (9) M_Sg = D_gr / (g c G_r) + D_gw / (g c G_w): Sea's time on local disks.
pub fn sea_disks(traffic: &Traffic, lustre: &Lustre, node: &Node) -> f64 {
    let level = disks_traffic(traffic, lustre, node);
    let disks = node.disks * lustre.compute_nodes;
    // A node without disks has no such level, rather than one that never ends.
    let over = |bytes: f64, bandwidth: f64| if bytes > 0.0 { bytes / (disks * bandwidth) } else { 0.0 };
    over(level.read, node.disk_read) + over(level.written, node.disk_write)
}

/// Of (10): D_Lr = D_m − D_gr − D_tr and D_Lw = D_m + D_f − D_gw − D_tw: bytes without room on a local level.
pub fn spilled_traffic(traffic: &Traffic, lustre: &Lustre, node: &Node) -> Level {
    let tmpfs = tmpfs_traffic(traffic, lustre, node);
    let disks = disks_traffic(traffic, lustre, node);
    Level {
        read: traffic.intermediate - disks.read - tmpfs.read,
        written: traffic.intermediate + traffic.output - disks.written - tmpfs.written,
    }
}

/// (10) M_SL = D_I / L_r + D_Lr / L_r + D_Lw / L_w: Sea's time on Lustre.
pub fn sea_lustre(traffic: &Traffic, lustre: &Lustre, node: &Node) -> f64 {
    let spilled = spilled_traffic(traffic, lustre, node);
    traffic.input / lustre_read(lustre) + spilled.read / lustre_read(lustre) + spilled.written / lustre_write(lustre)
}

/// (11) M_Sc = D_I / L_r + D_m / (c C_r) + (D_m + D_f) / (c C_w): Sea when all but the first read happens in memory.
pub fn sea_cached(traffic: &Traffic, lustre: &Lustre, node: &Node) -> f64 {
    let nodes = lustre.compute_nodes;
    traffic.input / lustre_read(lustre)
        + traffic.intermediate / (nodes * node.cache_read)
        + (traffic.intermediate + traffic.output) / (nodes * node.cache_write)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The paper's cluster (3.5.2), its fixed conditions (3.5.1) and table 2, in MiB and seconds; 25 GbE are 2,980.23 MiB/s.
    const LUSTRE: Lustre = Lustre {
        network: 2980.23,
        compute_nodes: 5.0,
        storage_nodes: 4.0,
        processes: 6.0,
        disks: 44.0,
        disk_read: 1381.14,
        disk_write: 121.0,
    };
    const NODE: Node = Node {
        cache_read: 6676.48,
        cache_write: 2560.0,
        tmpfs_room: 126.0 * 1024.0,
        disks: 6.0,
        disk_room: 447.0 * 1024.0,
        disk_read: 501.7,
        disk_write: 426.0,
    };
    /// 1,000 blocks of 617 MiB, incremented n times: n − 1 generations are intermediate.
    fn big_brain(iterations: f64) -> Traffic {
        let whole = 617_000.0;
        Traffic { input: whole, intermediate: (iterations - 1.0) * whole, output: whole, file: 617.0 }
    }

    fn close(got: f64, wanted: f64) {
        assert!((got / wanted - 1.0).abs() < 1e-4, "{got} instead of {wanted}");
    }

    #[test]
    fn bandwidths_match_the_cluster_of_the_paper() {
        // Reading: 4 × 2,980.23 of the servers' network is less than 5 × 2,980.23 and 30 × 1,381.14.
        close(lustre_read(&LUSTRE), 11_920.92);
        // Writing: 30 processes keep 30 of 44 disks busy.
        close(lustre_write(&LUSTRE), 3630.0);
    }

    /// Section 4.2: "our model predicts that the disk bandwidth will be the bottleneck, thus plateauing at 9 parallel processes per node".
    #[test]
    fn plateau_begins_at_nine_processes() {
        let at = |processes: f64| lustre_write(&Lustre { processes, ..LUSTRE });
        assert!(at(8.0) < at(9.0));
        close(at(9.0), 44.0 * 121.0);
        assert_eq!(at(9.0), at(64.0));
    }

    #[test]
    fn lustre_alone_with_and_without_page_cache() {
        // Five iterations: five generations read, five written, of 617,000 MiB each.
        close(lustre(3_085_000.0, 3_085_000.0, lustre_read(&LUSTRE), lustre_write(&LUSTRE)), 258.789 + 849.862);
        // (4) by hand: 2,468,000 / 33,382.4 + 3,085,000 / 12,800; (5) adds 617,000 / 11,920.92.
        close(cache(2_468_000.0, 3_085_000.0, 5.0, &NODE), 73.931 + 241.016);
        close(lustre_cached(&big_brain(5.0), &LUSTRE, &NODE), 51.758 + 73.931 + 241.016);
    }

    /// Section 3.4: "Sea and Lustre have an identical lower bound."
    #[test]
    fn both_have_the_same_lower_bound() {
        for iterations in [1.0, 5.0, 10.0, 15.0] {
            let traffic = big_brain(iterations);
            close(sea_cached(&traffic, &LUSTRE, &NODE), lustre_cached(&traffic, &LUSTRE, &NODE));
        }
    }

    #[test]
    fn sea_fills_its_levels_from_above() {
        let traffic = big_brain(5.0);
        // tmpfs: 5 × (129,024 − 6 × 617) = 626,610.
        let tmpfs = tmpfs_traffic(&traffic, &LUSTRE, &NODE);
        close(tmpfs.read, 626_610.0);
        close(tmpfs.written, 626_610.0);
        // Disks: 2,468,000 − 626,610 to read and 3,085,000 − 626,610 to write; there is room for 5 × (6 × 457,728 − 3,702).
        let disks = disks_traffic(&traffic, &LUSTRE, &NODE);
        close(disks.read, 1_841_390.0);
        close(disks.written, 2_458_390.0);
        assert_eq!(spilled_traffic(&traffic, &LUSTRE, &NODE), Level { read: 0.0, written: 0.0 });
        // (8) 626,610 / 33,382.4 + 626,610 / 12,800; (9) over 30 disks; (10) the input alone; (7) their sum.
        close(sea_tmpfs(&traffic, &LUSTRE, &NODE), 18.7707 + 48.9539);
        close(sea_disks(&traffic, &LUSTRE, &NODE), 122.344 + 192.362);
        close(sea_lustre(&traffic, &LUSTRE, &NODE), 51.758);
        close(sea(&traffic, &LUSTRE, &NODE), 434.189);
        let levels = [sea_tmpfs(&traffic, &LUSTRE, &NODE), sea_disks(&traffic, &LUSTRE, &NODE)];
        close(sea_levels(traffic.input, lustre_read(&LUSTRE), &levels), 434.189);
    }

    #[test]
    fn bytes_without_local_room_go_to_lustre() {
        let small = Node { tmpfs_room: 10_000.0, disks: 1.0, disk_room: 20_000.0, ..NODE };
        let traffic = Traffic { input: 100_000.0, intermediate: 100_000.0, output: 50_000.0, file: 500.0 };
        // 5 × (10,000 − 3,000) = 35,000 on tmpfs, 5 × (20,000 − 3,000) = 85,000 on disks. Of 100,000 read and 150,000
        // written nothing and 30,000 are left.
        assert_eq!(tmpfs_traffic(&traffic, &LUSTRE, &small).written, 35_000.0);
        assert_eq!(disks_traffic(&traffic, &LUSTRE, &small), Level { read: 65_000.0, written: 85_000.0 });
        assert_eq!(spilled_traffic(&traffic, &LUSTRE, &small), Level { read: 0.0, written: 30_000.0 });
        close(sea_lustre(&traffic, &LUSTRE, &small), 100_000.0 / 11_920.92 + 30_000.0 / 3630.0);
    }

    #[test]
    fn tmpfs_smaller_than_its_reserve_is_not_used() {
        let tight = Node { tmpfs_room: 6.0 * 617.0 - 1.0, disks: 0.0, disk_room: 0.0, ..NODE };
        let traffic = big_brain(5.0);
        assert_eq!(sea_tmpfs(&traffic, &LUSTRE, &tight), 0.0);
        assert_eq!(sea_disks(&traffic, &LUSTRE, &tight), 0.0);
        let everything = lustre(3_085_000.0, 3_085_000.0, lustre_read(&LUSTRE), lustre_write(&LUSTRE));
        close(sea(&traffic, &LUSTRE, &tight), everything);
    }
}
