//! `sallyport-demo [POLICY]`: an agent's day behind the sidecar. Exit status 1 if a row is not as expected.

use std::path::PathBuf;
use std::process::ExitCode;

fn main() -> ExitCode {
    let policy =
        std::env::args_os().nth(1).map_or_else(|| "policies/samples/support-bot.yaml".into(), PathBuf::from);
    match sallyport_e2e::demo::run(&policy) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(e) => {
            eprintln!("sallyport-demo: {e:#}");
            ExitCode::FAILURE
        }
    }
}
