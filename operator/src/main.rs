//! `sallyport-operator`: the operator's process.

use std::process::ExitCode;

fn main() -> ExitCode {
    sallyport_operator::main()
}
