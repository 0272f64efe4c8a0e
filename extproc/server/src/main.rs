//! `sallyport-extproc`: the sidecar's process.

use std::process::ExitCode;

fn main() -> ExitCode {
    sallyport_extproc::cli::main()
}
