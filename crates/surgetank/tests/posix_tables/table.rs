//! Reads a table of cases and makes scenarios of it: one for each combination of its `for` lines.
//!
//! ```text
//! steps NUMBER                  of all scenarios together: a table that runs less fails
//! list NAME                     values for `for`, one a line, indented; ` ; ` separates the columns of a value
//! = NAME                        begins a case
//! for A/B in 1/2 3/4            or `for A/B in NAME`; inside a step `{A}` stands for the value
//! let NAME WORDS                another value
//! WHO: CALL WORDS -> OUTCOME    by user WHO (root if left out), with this outcome (`0` if left out)
//! CALL WORDS => NAME            the outcome is remembered
//! ```
//! Outcomes: alternatives are separated by `|`; `@NAME` refers to a remembered value, `>NAME` to a later time.

use std::collections::BTreeMap;

/// Two users without privileges, each with a group of the same number.
const USERS: &[(&str, &str)] = &[("A", "1001"), ("B", "1002")];

pub struct Scenario {
    /// Table, case and the values of its variables.
    pub name: String,
    pub steps: Vec<Step>,
}

pub struct Step {
    pub call: String,
    /// A line of the script.
    pub line: String,
    pub outcome: Outcome,
}

pub enum Outcome {
    Any(Vec<String>),
    Remembered(String),
}

type Values = BTreeMap<String, String>;
type Lists = BTreeMap<String, Vec<Vec<String>>>;

/// The scenarios of a table, in its order.
pub fn scenarios(table: &str, text: &str) -> Vec<Scenario> {
    let mut lists = Lists::new();
    let mut steps = 0;
    let mut list = String::new();
    let mut cases: Vec<(String, Vec<&str>)> = Vec::new();
    for line in text.lines().filter(|line| !line.trim().is_empty() && !line.starts_with('#')) {
        if let Some(number) = line.strip_prefix("steps ") {
            steps = number.parse().unwrap();
        } else if let Some(name) = line.strip_prefix("list ") {
            name.clone_into(&mut list);
        } else if let Some(value) = line.strip_prefix("  ") {
            let value = value.split(" ; ").map(|column| column.trim().to_owned()).collect();
            lists.entry(list.clone()).or_default().push(value);
        } else if let Some(name) = line.strip_prefix("= ") {
            cases.push((format!("{table}/{name}"), Vec::new()));
        } else {
            cases.last_mut().unwrap_or_else(|| panic!("{table}: no case before: {line}")).1.push(line);
        }
    }
    let mut found = Vec::new();
    for (name, lines) in cases {
        expand(&name, &lines, &constants(), &lists, &mut found);
    }
    let number: usize = found.iter().map(|one| one.steps.len()).sum();
    assert_eq!(number, steps, "steps of the table {table}");
    found
}

/// The first `for` is the outermost loop.
fn expand(name: &str, lines: &[&str], values: &Values, lists: &Lists, found: &mut Vec<Scenario>) {
    let Some((variables, range)) =
        lines.first().and_then(|line| line.strip_prefix("for ")).and_then(|line| line.split_once(" in "))
    else {
        found.push(scenario(name, lines, values.clone()));
        return;
    };
    let variables: Vec<&str> = variables.split('/').collect();
    let words =
        || range.split(' ').map(|word| word.splitn(variables.len(), '/').map(str::to_owned).collect()).collect();
    for value in lists.get(range).cloned().unwrap_or_else(words) {
        let mut values = values.clone();
        assert_eq!(variables.len(), value.len(), "{name}: {value:?}");
        values.extend(variables.iter().map(|name| (*name).to_owned()).zip(value.iter().cloned()));
        expand(&format!("{name} {}", value.join(" ")), &lines[1..], &values, lists, found);
    }
}

fn scenario(name: &str, lines: &[&str], mut values: Values) -> Scenario {
    let mut steps = Vec::new();
    for line in lines {
        if let Some((variable, value)) = line.strip_prefix("let ").and_then(|line| line.split_once(' ')) {
            values.insert(variable.to_owned(), filled(value, &values));
            continue;
        }
        let line = filled(line, &values);
        let (call, outcome) = match (line.split_once(" -> "), line.split_once(" => ")) {
            (Some((call, outcome)), _) => (call, Outcome::Any(outcome.split('|').map(str::to_owned).collect())),
            (_, Some((call, name))) => (call, Outcome::Remembered(name.to_owned())),
            _ => (line.as_str(), Outcome::Any(vec!["0".to_owned()])),
        };
        steps.push(Step { call: call.to_owned(), line: script_line(call), outcome });
    }
    Scenario { name: filled(name, &values), steps }
}

/// In `A/7,8: mkdir x` user A, with the groups 7 and 8, makes the call.
fn script_line(call: &str) -> String {
    let Some((actor, call)) = call.split_once(": ") else { return format!("0/0 {call}") };
    let (user, groups) = actor.split_once('/').unwrap_or((actor, ""));
    let id = USERS.iter().find(|(name, _)| *name == user).unwrap_or_else(|| panic!("no such user: {actor}")).1;
    format!("{id}/{} {call}", if groups.is_empty() { id } else { groups })
}

/// A value may contain names of other values.
fn filled(text: &str, values: &Values) -> String {
    let mut text = text.to_owned();
    while let Some(begin) = text.find('{') {
        assert!(text.len() < 1 << 16, "a value names itself: {}", &text[..80]);
        let end = begin + text[begin..].find('}').unwrap_or_else(|| panic!("no end: {text}"));
        let name = &text[begin + 1..end];
        let value = values.get(name).unwrap_or_else(|| panic!("no such value: {name}"));
        text.replace_range(begin..=end, value);
    }
    text
}

/// Owners, and names and paths of the maximum length and of one byte more.
fn constants() -> Values {
    let deep: String = (0..31).map(|_| "d".repeat(127) + "/").collect();
    let deep = format!("{deep}{}", "f".repeat(4095 - deep.len()));
    let mut values: Values = USERS.iter().map(|(user, id)| ((*user).to_owned(), format!("{id}:{id}"))).collect();
    values.insert("root".to_owned(), "0:0".to_owned());
    values.insert("long".to_owned(), "n".repeat(255));
    values.insert("longer".to_owned(), "n".repeat(256));
    values.insert("deeper".to_owned(), format!("{deep}f"));
    values.insert("deep".to_owned(), deep);
    values
}
