//! Texts and the views of them that rules look at.

pub(crate) mod html;
pub(crate) mod map;
pub(crate) mod normal;
pub(crate) mod views;
