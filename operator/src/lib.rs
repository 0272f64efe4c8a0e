//! The operator.

pub mod discovery;
pub mod events;
pub mod index;
pub mod status;

/// Runs the process.
pub fn main() -> std::process::ExitCode {
    std::process::ExitCode::SUCCESS
}
