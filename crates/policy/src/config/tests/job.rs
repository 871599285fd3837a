//! The end of the job.

use super::*;

#[test]
fn deadline_in_configuration_overrides_slurm() {
    let mut place = Place::new();
    let deadline = |place: &Place, text: Option<&str>| {
        let overrides = Overrides { deadline: text.map(str::to_owned), ..Overrides::default() };
        let loaded = place.load(overrides).expect("load");
        (loaded.config.deadline, loaded.notes.join("\n"))
    };
    assert_eq!(deadline(&place, None).0, None);
    let now = surgetank_types::clock::now().secs();
    place.env("SLURM_JOB_END_TIME", (now + 5000).to_string());
    let (found, notes) = deadline(&place, None);
    assert_eq!(found.as_ref().map(|found| found.unix_seconds), Some(now + 5000));
    assert!(notes.contains("says SLURM_JOB_END_TIME"), "{notes}");
    // The configured end takes precedence, also "none".
    let (found, notes) = deadline(&place, Some("1h"));
    assert!(found.is_some_and(|found| (3600..3700).contains(&(found.unix_seconds - now))), "{notes}");
    assert!(notes.contains("says --deadline"), "{notes}");
    assert_eq!(deadline(&place, Some("none")), (None, String::new()));
    // A variable of an earlier job, or nonsense, does not prevent the start.
    for (text, word) in [((now - 5).to_string(), "has passed"), ("soon".to_owned(), "not a number")] {
        place.env("SLURM_JOB_END_TIME", text);
        let (found, notes) = deadline(&place, None);
        assert!(found.is_none() && notes.contains(word), "{notes}");
    }
    // If Slurm does not report the end, the command asks `squeue`, unless the configuration has an end.
    place.env("SLURM_JOB_ID", "17");
    let job = |deadline: Option<&str>| {
        let overrides = Overrides { deadline: deadline.map(str::to_owned), ..Overrides::default() };
        place.load(overrides).expect("load").config.job
    };
    assert_eq!((job(None).as_deref(), job(Some("none")), job(Some("1h"))), (Some("17"), None, None));
    assert!(deadline(&place, None).1.contains("job 17") && !deadline(&place, Some("1h")).1.contains("squeue"));
    let refused =
        place.load(Overrides { deadline: Some("90".to_owned()), ..Overrides::default() }).expect_err("no unit");
    assert!(refused.to_string().contains("2h30m"), "{refused}");
}
