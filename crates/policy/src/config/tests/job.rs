//! When the job ends.

use super::*;

#[test]
fn the_end_of_the_job_is_said_or_slurms() {
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
    // What is said is stronger, also that there is none.
    let (found, notes) = deadline(&place, Some("1h"));
    assert!(found.is_some_and(|found| (3600..3700).contains(&(found.unix_seconds - now))), "{notes}");
    assert!(notes.contains("says --deadline"), "{notes}");
    assert_eq!(deadline(&place, Some("none")), (None, String::new()));
    // Left over from a job that is over, or nonsense: nobody is kept from working.
    for (text, word) in [((now - 5).to_string(), "is over"), ("soon".to_owned(), "no number")] {
        place.env("SLURM_JOB_END_TIME", text);
        let (found, notes) = deadline(&place, None);
        assert!(found.is_none() && notes.contains(word), "{notes}");
    }
    // Of a job that is not told, `squeue` is asked by who begins something; not against what was said.
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
