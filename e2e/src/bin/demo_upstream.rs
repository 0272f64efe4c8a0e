//! The demo's upstream on its own: `sallyport-demo-upstream [PORT]`.

use sallyport_e2e::upstream::Upstream;

fn main() -> anyhow::Result<()> {
    let port = std::env::args().nth(1).map_or(Ok(0), |p| p.parse())?;
    let upstream = Upstream::start(port)?;
    println!("{}", upstream.url(""));
    upstream.wait();
    Ok(())
}
