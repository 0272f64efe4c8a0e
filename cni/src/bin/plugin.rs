//! The CNI plugin; the container runtime calls it.
#![forbid(unsafe_code)]

use std::io::{Read as _, Write as _};
use std::process::ExitCode;

use sallyport_cni::{plugin, wire};

fn main() -> ExitCode {
    // Neither name nor value of a variable need be UTF-8; those of the specification are.
    let environment = std::env::vars_os()
        .filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)))
        .collect();
    let mut stdin = String::new();
    // What does not fit or can't be read is no JSON then, and said to be so.
    let _ = std::io::stdin().take(wire::MOST_BYTES as u64 * 2).read_to_string(&mut stdin);
    let answer = plugin::run(&environment, &stdin);
    match std::io::stdout().write_all(answer.text.as_bytes()) {
        Ok(()) => ExitCode::from(answer.status),
        Err(_) => ExitCode::FAILURE,
    }
}
