//! Commands that the program prints: taken from its output, and given unchanged to a shell.

use super::{Ended, Running, Scene};

const PROGRAM: &str = "surgetank ";

impl Ended {
    /// Every command that is printed on a line of its own.
    pub fn all_printed(&self) -> Vec<String> {
        let lines = self.stdout.lines().chain(self.stderr.lines());
        let commands = lines.map(|line| line.trim_start().trim_start_matches("try:  "));
        commands.filter(|line| line.starts_with(PROGRAM)).map(str::to_owned).collect()
    }

    /// The printed command of this verb.
    #[track_caller]
    pub fn printed(&self, verb: &str) -> String {
        let all = self.all_printed();
        let begin = format!("{PROGRAM}{verb} ");
        let found = all.iter().find(|line| line.starts_with(&begin));
        found.unwrap_or_else(|| panic!("no `{begin}` is printed in:\n{}{}", self.stdout, self.stderr)).clone()
    }
}

impl Scene {
    /// Runs the line in another directory, as a user who has only this line.
    #[track_caller]
    pub fn as_printed(&self, line: &str) -> Ended {
        let mut command = self.command("bash");
        let path = format!("/mnt:{}", std::env::var("PATH").unwrap());
        command.args(["-c", line]).current_dir("/mnt").env("PATH", path);
        Running::of(command).ends()
    }
}
